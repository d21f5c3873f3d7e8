"""Convolutions, scans and gates of recurrent layers: the kernels behind `kernels/recurrent.py`."""
