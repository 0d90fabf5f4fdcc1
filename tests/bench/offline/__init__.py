"""What interactive requests feel of an endless offline batch, and how much of it is done: in virtual time."""
