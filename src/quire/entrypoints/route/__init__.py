"""`quire route`: one address for several servers."""
