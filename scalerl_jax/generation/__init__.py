"""The generators: engines kept full, episodes from prompt to verdict, evaluation."""
