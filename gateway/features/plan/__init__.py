"""`gateway plan`: what a model needs of a GPU's memory, and how many requests that leaves room for."""
