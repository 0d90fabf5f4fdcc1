"""The dashboard on the admin port: its views, its stream, and its files."""
