"""The console: a page for people, on the server that it shows."""
