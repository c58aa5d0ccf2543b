"""Devices and processes: meshes, compiler options, and starting several processes."""
