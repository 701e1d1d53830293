package fleet.example;

import com.google.gson.Gson;
import com.google.gson.reflect.TypeToken;
import io.grpc.CallCredentials;
import io.grpc.ChannelCredentials;
import io.grpc.CompositeChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.TlsChannelCredentials;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.concurrent.Executor;
import java.util.concurrent.TimeUnit;

/** The way to a head. */
final class Connection {
    private Connection() {}

    /**
     * Gives a channel: with TLS where there is a CA file, with a token on every call where there is a token file.
     * It connects on the first call, and anew when the connection breaks.
     *
     * @param caFile null for no TLS
     * @param tokenFile null for no token
     */
    static ManagedChannel open(String address, Path caFile, Path tokenFile) throws IOException {
        return Grpc.newChannelBuilder(address, credentials(caFile, tokenFile))
                .defaultServiceConfig(serviceConfig())
                .enableRetry()
                // Tells a connection that has died in silence; without calls nothing is sent.
                .keepAliveTime(15, TimeUnit.SECONDS)
                .keepAliveTimeout(5, TimeUnit.SECONDS)
                .build();
    }

    private static ChannelCredentials credentials(Path caFile, Path tokenFile) throws IOException {
        if (caFile == null) {
            return InsecureChannelCredentials.create();
        }
        ChannelCredentials secure = TlsChannelCredentials.newBuilder().trustManager(caFile.toFile()).build();
        if (tokenFile == null) {
            return secure;
        }
        return CompositeChannelCredentials.create(secure, new Bearer(Files.readString(tokenFile).strip()));
    }

    /** What is published beside the contract: timeouts, and which calls are tried again by gRPC itself. */
    private static Map<String, ?> serviceConfig() throws IOException {
        try (var file = Connection.class.getResourceAsStream("/fleet/v1/service_config.json")) {
            var reader = new InputStreamReader(file, StandardCharsets.UTF_8);
            return new Gson().fromJson(reader, new TypeToken<Map<String, ?>>() {});
        }
    }

    /** Shows a token on every call. */
    private static final class Bearer extends CallCredentials {
        private static final Metadata.Key<String> AUTHORIZATION =
                Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
        private final String token;

        Bearer(String token) {
            this.token = token;
        }

        @Override
        public void applyRequestMetadata(RequestInfo call, Executor executor, MetadataApplier applier) {
            Metadata headers = new Metadata();
            headers.put(AUTHORIZATION, "Bearer " + token);
            applier.apply(headers);
        }
    }
}
