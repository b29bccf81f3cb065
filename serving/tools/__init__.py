"""What a chat may call: told to the model, and read from what it says."""
