"""What a run was made with, whether its servers did what they should, and whether that still holds."""
