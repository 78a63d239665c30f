"""What a method reads and changes besides its arguments, and how that is compared."""
