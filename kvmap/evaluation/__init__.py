"""Questions and perplexity, for every arm and its controls, with how sure each number is."""
