"""A capture, of whatever tool and version, as tables."""
