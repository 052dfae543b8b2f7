"""Answers: columns, results, selection of rows, formats, and the one writer of files."""
