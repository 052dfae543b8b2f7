"""The results of questions: tables that print, display in a notebook, and save in any format."""
