"""Hosts: the frameworks that own the training loop or the serving engine, one thin module each.

A module here is imported by who uses its host, and imports the host; nothing else of the package does. What they share
is `loop.HostLoop`. An integration never fails the run: what goes wrong inside becomes one warning.
"""
