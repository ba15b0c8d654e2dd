"""The parts of the HTML report: numbers, charts and tables, and the templates they are put into."""
