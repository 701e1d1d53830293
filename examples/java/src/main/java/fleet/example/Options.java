package fleet.example;

import java.nio.file.Path;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Stream;

/** What the program is told. Token ids are 32 bits without a sign, which Java keeps in an int. */
record Options(
        String address,
        Path ca,
        Path tokenFile,
        String model,
        List<Integer> prompt,
        int maxTokens,
        int deadlineMs,
        int cancelAfter) {

    private static final String USAGE = """
            usage: fleet-client [--NAME VALUE ...]
              --address HOST:PORT   the head; 127.0.0.1:8455
              --ca FILE             the certificate authority to believe; without it there is no TLS
              --token-file FILE     holds the token to show; needs --ca
              --model NAME          demo
              --prompt IDS          token ids, separated by commas; 1,2,3
              --max-tokens N        most tokens to generate; 16
              --deadline SECONDS    what the answer may take in all; 60
              --cancel-after N      cancel once there are so many tokens; 0 = never""";

    /** Raises IllegalArgumentException with a text for people. */
    static Options parse(String[] arguments) {
        Map<String, String> given = new HashMap<>(Map.of(
                "--address", "127.0.0.1:8455",
                "--ca", "",
                "--token-file", "",
                "--model", "demo",
                "--prompt", "1,2,3",
                "--max-tokens", "16",
                "--deadline", "60",
                "--cancel-after", "0"));
        for (int i = 0; i < arguments.length; i += 2) {
            if (i + 1 == arguments.length || given.replace(arguments[i], arguments[i + 1]) == null) {
                throw new IllegalArgumentException(USAGE);
            }
        }
        Path ca = path(given.get("--ca"));
        Path tokenFile = path(given.get("--token-file"));
        if (tokenFile != null && ca == null) {
            throw new IllegalArgumentException("--token-file needs --ca: a token is shown over TLS only");
        }
        try {
            return new Options(
                    given.get("--address"),
                    ca,
                    tokenFile,
                    given.get("--model"),
                    Stream.of(given.get("--prompt").split(",")).map(Integer::parseUnsignedInt).toList(),
                    Integer.parseInt(given.get("--max-tokens")),
                    (int) (Double.parseDouble(given.get("--deadline")) * 1000),
                    Integer.parseInt(given.get("--cancel-after")));
        } catch (NumberFormatException error) {
            throw new IllegalArgumentException(error.getMessage() + "\n" + USAGE, error);
        }
    }

    private static Path path(String text) {
        return text.isEmpty() ? null : Path.of(text);
    }
}
