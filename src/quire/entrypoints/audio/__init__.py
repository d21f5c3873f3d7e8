"""Speech to text: OpenAI's routes for transcriptions and translations."""
