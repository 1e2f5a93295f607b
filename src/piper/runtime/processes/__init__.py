"""The processes of a run: where they meet, what they tell each other, who waits for whom."""
