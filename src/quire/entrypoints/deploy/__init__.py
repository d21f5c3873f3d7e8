"""Deployment files: what a server needs from the place where it runs, written for Docker, Kubernetes, systemd and Prometheus."""
