"""The HTTP layer of the server: connections, bodies, streams, errors. Knows no protocol."""
