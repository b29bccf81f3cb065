"""What the Mosaic GPU kernels share: where they run, their tiles, and the work of one warpgroup on one tile."""
