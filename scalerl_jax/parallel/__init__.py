"""Devices and processes: meshes, their shares, and params on the way between them."""
