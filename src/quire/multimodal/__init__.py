"""Media on the frontend's side: from what users give to tokens of a prompt and arrays for the model's encoder."""
