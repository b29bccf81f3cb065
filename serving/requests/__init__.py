"""What is asked: from a body to what the engine queues, and the OpenAPI document of it."""
