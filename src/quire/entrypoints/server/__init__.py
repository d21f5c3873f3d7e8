"""The server as a whole: its application, its table of routes, its process."""
