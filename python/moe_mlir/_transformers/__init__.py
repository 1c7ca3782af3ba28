"""What is known of the libraries that models come from: transformers' names and caches."""
