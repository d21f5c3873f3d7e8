"""One server for several models, each in a server process of its own."""
