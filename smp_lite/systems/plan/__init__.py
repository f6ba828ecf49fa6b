"""What a configuration asks for, whatever system it is written for."""
