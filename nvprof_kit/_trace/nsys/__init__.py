"""SQLite exports of Nsight Systems as tables."""
