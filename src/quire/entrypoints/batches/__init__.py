"""OpenAI's batches: files of requests that are answered when there is time, and survive the end of any process."""
