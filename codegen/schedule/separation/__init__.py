"""What leaves a sum, and which sums may be relative to an extreme that is still being found."""
