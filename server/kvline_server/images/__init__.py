"""What a picture of a request becomes: its bytes, bounded, decoded and resized; its grid, its
tokens and their positions. Pure: no network, no clock, no torch."""
