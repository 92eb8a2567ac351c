"""Page, tables and pictures of a study."""
