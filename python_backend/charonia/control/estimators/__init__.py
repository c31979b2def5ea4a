"""What is learned from steps and answers that were: times, lengths, and the memory these take."""
