"""What is exported, gathered from the specializations before anything is written."""
