"""What a trained model of each kind of data is shown by: samples, pictures, figures."""
