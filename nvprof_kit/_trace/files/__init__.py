"""Format-independent file access: detection, decompression and bulk reads."""
