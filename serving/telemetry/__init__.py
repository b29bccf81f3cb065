"""What is told of the server: metrics, access log, spans, histories, the page."""
