// Stands for Elastic's client in the Jaeger that tests build: see the package.
module github.com/elastic/go-elasticsearch/v9

go 1.24
