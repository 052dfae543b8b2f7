"""Integrations with frameworks that own the training loop or the serving engine, one module each.

Import the module of your framework; the other modules, and the rest of the package, do not import it. The shared part
is `_host.HostLoop`. An integration does not fail the run: an exception inside it becomes one warning.
"""
