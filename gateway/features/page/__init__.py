"""The dashboard on the admin port: what it shows, the stream of it, and its files."""
