"""Around loops: what they carry for those who read their steps later, and what they hand to other loops."""
