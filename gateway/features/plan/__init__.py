"""`gateway plan`: a model's part of a GPU's memory, and the number of requests that fit in the rest."""
