"""Page, tables and plots of a study."""
