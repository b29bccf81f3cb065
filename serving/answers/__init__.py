"""What is answered: bodies and streams in OpenAI's shapes."""
