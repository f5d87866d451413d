"""Tables for print and notebook, and progress on a terminal."""
