"""What recording leaves behind: commands, and how they are used again."""
