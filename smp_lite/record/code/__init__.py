"""What the code of the user says: names that it mentions, and what lies there."""
