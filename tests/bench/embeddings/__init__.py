"""What putting embeddings requests together is worth."""
