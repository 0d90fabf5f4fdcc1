"""Files and offline batches: what is uploaded, how its lines run, and where the answers are kept."""
