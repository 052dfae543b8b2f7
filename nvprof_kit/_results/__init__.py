"""What a question is answered with: a table that prints, shows itself in a notebook, and is saved in any form."""
