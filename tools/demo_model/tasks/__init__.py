"""The demo model's tasks: what it is trained on, and what it is asked."""
