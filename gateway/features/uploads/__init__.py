"""Files in multipart forms: their fields are read while they arrive, their content is passed on."""
