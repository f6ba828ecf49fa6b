"""Parameters of which every data-parallel rank holds a piece (ZeRO-3)."""
